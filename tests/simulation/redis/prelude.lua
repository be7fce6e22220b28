-- What a script sees, and how it is run. Answers are written down here: to hand tables over costs more.
-- `call` and `pcall` are functions of C, so that a tail call of them keeps the line that it stands in.
local call, pcall_, problem_of, sha1, decode, null, is_seven = ...
local type, rawget, rawset, tostring, error, select = type, rawget, rawset, tostring, error, select
local sub, gsub, format, concat = string.sub, string.gsub, string.format, table.concat
local getinfo, setfenv, loadstring, xpcall = debug.getinfo, setfenv, loadstring, xpcall

local redis = {LOG_DEBUG = 0, LOG_VERBOSE = 1, LOG_NOTICE = 2, LOG_WARNING = 3}
redis.call, redis.pcall = python.as_function(call), python.as_function(pcall_)

function redis.error_reply(text)
  if is_seven then
    if sub(text, 1, 1) == '-' then
      text = sub(text, 2)
    end
    if not string.find(text, ' ', 1, true) then
      text = 'ERR ' .. text
    end
  end
  return {err = text}
end

function redis.status_reply(text)
  return {ok = text}
end

function redis.sha1hex(text)
  return sha1(tostring(text))
end

function redis.log()
end

local cjson = {null = null}

function cjson.decode(text)
  local value, problem = decode(text)
  if problem then
    error(problem, 2)
  end
  return value
end

local scope = {redis = redis, cjson = cjson, KEYS = {}, ARGV = {}}
for _, name in ipairs({
  'assert', 'coroutine', 'error', 'ipairs', 'math', 'next', 'pairs', 'pcall', 'rawequal', 'rawget', 'rawset', 'select',
  'setmetatable', 'getmetatable', 'string', 'table', 'tonumber', 'tostring', 'type', 'unpack', 'xpcall', '_VERSION',
}) do
  scope[name] = _G[name]
end
scope._G = scope
setmetatable(scope, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
  __newindex = function()
    error('Attempt to modify a readonly table', 2)
  end,
})

-- Where the script was when it failed: not here, nor in Lua's own functions.
local function place()
  local level = 2
  local found = getinfo(level, 'Sl')
  while found and found.source ~= '@user_script' do
    level = level + 1
    found = getinfo(level, 'Sl')
  end
  return found
end

local function failed(err)
  local at = place()
  -- What `call` has raised.
  err = type(err) == 'userdata' and problem_of() or err
  if not is_seven then
    return at and at.source .. ':' .. at.currentline .. ': ' .. err or err
  end
  if type(err) ~= 'table' then
    err = {err = 'ERR ' .. tostring(err)}
  end
  if at then
    err.source, err.line = at.source, tostring(at.currentline)
  end
  return err
end

local function line(text)
  return (gsub(text, '[\r\n]', ' '))
end

local function error_line(text)
  return line((gsub(text, '[\r\n]+$', '')))
end

local function written(value)
  local kind = type(value)
  if kind == 'string' then
    return '$' .. #value .. '\r\n' .. value .. '\r\n'
  elseif kind == 'number' then
    return format(':%d\r\n', value)
  elseif value == true then
    return ':1\r\n'
  elseif kind ~= 'table' then
    return '$-1\r\n'
  end
  local err, ok = rawget(value, 'err'), rawget(value, 'ok')
  if type(err) == 'string' then
    return '-' .. error_line(err) .. '\r\n'
  elseif type(ok) == 'string' then
    return '+' .. line(ok) .. '\r\n'
  end
  local parts, count = {}, 0
  local each = rawget(value, 1)
  while each ~= nil do
    count = count + 1
    parts[count] = written(each)
    each = rawget(value, count + 1)
  end
  return '*' .. count .. '\r\n' .. concat(parts)
end

local function refused(sha, err)
  if type(err) ~= 'table' then
    return '-ERR Error running script (call to f_' .. sha .. '): ' .. error_line(tostring(err)) .. '\r\n'
  end
  local text = tostring(rawget(err, 'err'))
  if rawget(err, 'line') then
    text = text .. ' script: ' .. sha .. ', on ' .. err.source .. ':' .. err.line .. '.'
  end
  return '-' .. line(text) .. '\r\n'
end

local function run(script, sha, keys, args)
  rawset(scope, 'KEYS', keys)
  rawset(scope, 'ARGV', args)
  local done, value = xpcall(script, failed)
  if done then
    return written(value)
  end
  return refused(sha, value)
end

local function run_with(script, sha, count, ...)
  local keys, args = {...}, {select(count + 1, ...)}
  for i = #keys, count + 1, -1 do
    keys[i] = nil
  end
  return run(script, sha, keys, args)
end

local function compile(text)
  local script, problem = loadstring(text, '@user_script')
  if script then
    setfenv(script, scope)
  end
  return script, problem
end

-- Of which the errors of a call are, before version 7.
local function here()
  local at = place()
  return at and at.source .. ': ' .. at.currentline .. ': ' or ''
end

return compile, run, run_with, here, redis.status_reply
